import logging
import sys
import warnings

from checkpoint_tools.cli import main

# What torch, Megatron and transformers find missing here, such as a GPU or apex, is nothing that a conversion needs.
warnings.simplefilter("ignore")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
sys.exit(main())
