"""The built-in tokenizer of random models: 64 tokens, one per character, so that tiny models need no files."""

import string
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<system>", "<user>", "<assistant>")
CHARACTERS = string.digits + string.ascii_lowercase + " \n" + ".,:;?!+-*/=()<>#$'\""

# A role token opens a turn; only the assistant's turn ends with EOS, as that is the only one a model has to end itself.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_char_tokenizer() -> Any:
    """A PreTrainedTokenizerFast over SPECIAL_TOKENS + CHARACTERS (ids in that order). Upper case is lowered, anything
    else unknown is `<unk>`. Ids beyond the vocabulary decode to nothing, so a model may have padded rows."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL_TOKENS[4:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
