import sys

from checkpoint_tools.cli import main

sys.exit(main())
