"""From a row to token ids."""

from typing import Any

from dapo_megatron.config import DataConfig
from dapo_megatron.data.rows import Row

PLACEHOLDER = "{prompt}"
REPLY = "the reply goes here"


class PromptRenderer:
    """Renders rows as `data.format` says.

    `chat`: [system turn] + few-shot turns + the row's turns through the tokenizer's chat template, up to where the
    assistant begins. `plain`: the same texts without roles, a line each, encoded with the tokenizer's own special
    tokens. `data.template` goes around the problem, in examples too. A row that brings a system turn keeps it,
    data.system is for the others.
    Some chat templates (SmolLM2's) put in a system turn of their own if there is none.
    """

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        if PLACEHOLDER not in data.template:
            raise ValueError(f"data.template: {data.template!r} lacks {PLACEHOLDER}, which stands for the problem; add it")
        for i, example in enumerate(data.few_shot):
            if len(example) != 2:
                raise ValueError(f"data.few_shot[{i}]: {example!r} must be [question, reply]")
        if data.format not in ("chat", "plain"):
            raise ValueError(f"data.format: {data.format!r} must be chat or plain")
        if data.format == "chat" and not tokenizer.chat_template:
            raise ValueError(
                "data.format: chat needs a tokenizer with a chat template, and the model's has none; set data.format=plain, or "
                "use a chat model"
            )
        self._tokenizer = tokenizer
        self._data = data

    def turns(self, row: Row) -> list[dict[str, str]]:
        """All turns, templates and examples included."""
        own = [("user", row.prompt)] if isinstance(row.prompt, str) else list(row.prompt)
        # not str.format: problems and templates are full of LaTeX braces
        own[-1] = ("user", self._data.template.replace(PLACEHOLDER, own[-1][1]))
        turns: list[tuple[str, str]] = []
        if own[0][0] == "system":
            turns.append(own.pop(0))
        elif self._data.system:
            turns.append(("system", self._data.system))
        for question, reply in self._data.few_shot:
            turns += [("user", self._data.template.replace(PLACEHOLDER, question)), ("assistant", reply)]
        return [{"role": role, "content": content} for role, content in turns + own]

    def text(self, row: Row) -> str:
        turns = self.turns(row)
        if self._data.format == "plain":
            return "\n".join(turn["content"] for turn in turns)
        try:
            return self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs: they raise what they like, e.g. for a system turn
            raise ValueError(
                f"the tokenizer's chat template refuses {[t['role'] for t in turns]} ({error}); "
                "change data.system or data.few_shot, or use data.format: plain"
            ) from error

    def encode(self, rows: list[Row]) -> list[list[int]]:
        """Token ids of each row's prompt. ValueError if the chat template refuses the turns or leaves the reply unopened."""
        # a chat template writes the special tokens itself
        special = self._data.format == "plain"
        if rows and not special:
            self._check_reply_follows(rows[0])
        return self._tokenizer([self.text(row) for row in rows], add_special_tokens=special)["input_ids"]

    def _check_reply_follows(self, row: Row) -> None:
        """The model must be at the assistant's turn when the prompt ends, else it goes on with the user's.

        Most templates write that turn's header when asked for a generation prompt. Some have no header to write
        (`[INST] ... [/INST]`) or write it always: those don't heed the request either, but put a reply right after the prompt.
        """
        turns, text = self.turns(row), self.text(row)
        if text != self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False):
            return
        try:
            answered = self._tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": REPLY}], tokenize=False)
        except Exception:  # see text()
            answered = ""
        before_reply = answered.partition(REPLY)[0]
        if not answered or before_reply.rstrip() != text.rstrip():
            raise ValueError(
                "data.format: chat needs a chat template that opens the assistant's turn, and the tokenizer's ends a prompt "
                f"with {text[-40:]!r} whether add_generation_prompt is set or not: the model would go on with the user's turn. "
                "Add `{% if add_generation_prompt %}` with the assistant's header to the template, or set data.format=plain"
            )
