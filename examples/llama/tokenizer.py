"""The tokenizer that a GGUF file describes: text to token ids and back, piece by piece too, and chats.

Two kinds of vocabulary are understood: byte-level BPE as of GPT-2 and SmolLM2, and plain bytes.
"""

from __future__ import annotations

import codecs
import functools
import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from package import has_failed

from .gguf_file import File, read_file
from .weights import model_path

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as Encoder

__all__ = ["Detokenizer", "Tokenizer"]

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_SPACE = "\u2581"
"""What stands for a space in a vocabulary of SentencePiece's kind."""

_BREAK = "\u200b"
"""A space of no width."""

_ENDS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "</s>")
"""Control tokens that end a text in any model which has them, whatever its file names as the end."""


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level BPE writes bytes: printable ones stand for themselves, others are moved up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """Token ids of texts and chats, and the texts of token ids.

    Attributes:
        n_vocab: how many tokens there are.
        stop_ids: tokens that end a text.
    """

    def __init__(self, source: str | os.PathLike[str] | File | None = None) -> None:
        """Builds the tokenizer.

        Args:
            source: a GGUF file, or its header; the installed model when None.

        Raises:
            FileNotFoundError: there is no such file, or no installed model.
            ValueError: the file is damaged, or has another kind of tokenizer; the message names it.
        """
        file = source if isinstance(source, File) else read_file(model_path() if source is None else source)
        self._path, self._fields = file.path, file.fields
        tokens, kinds = self._field("tokens"), self._field("token_type")
        if not (isinstance(tokens, list) and tokens and hasattr(kinds, "tolist") and len(kinds) == len(tokens)):
            raise ValueError(f"{self._path}: it has no list of tokens, or no type for each of them")
        self.n_vocab = len(tokens)
        self._ids = {token: i for i, token in enumerate(tokens)}
        kinds = kinds.tolist()
        self._control = frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL)
        self._bos, eos = self._id("bos_token_id"), self._id("eos_token_id")
        ends = {eos, self._id("eot_token_id"), self._id("eom_token_id")}
        ends |= {self._ids[text] for text in _ENDS if self._ids.get(text) in self._control}
        self.stop_ids = frozenset(ends - {None})
        names = [re.escape(tokens[i]) for i in sorted(self._control) if tokens[i]]
        # One letter behind which a name begins, so that names that overlap are found, too.
        self._control_names = re.compile(f"(?={'|'.join(names)})." if names else r"(?!)", re.DOTALL)
        self._names = {
            "bos_token": "" if self._bos is None else tokens[self._bos],
            "eos_token": "" if eos is None else tokens[eos],
        }
        model = self._text("model")
        if model == "gpt2":
            self._pieces = _bpe_pieces(tokens, kinds)
            special = [tokens[i] for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)]
            self._plain, self._special = self._encoder([]), self._encoder(special)
        elif model == "llama":
            self._pieces = self._byte_pieces(tokens, kinds)
            self._plain = self._special = None
        else:
            raise ValueError(
                f"{self._path}: its tokenizer is {model!r}; only 'gpt2' (byte-level BPE) and bytes are known"
            )

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text, with the token that begins a text in front if the model wants one.

        Args:
            text: any text; bytes of it that the vocabulary lacks are lost (SmolLM2's lacks some control characters).
            special: whether names such as ``<|im_end|>`` stand for control tokens; else they are text like any other.
        """
        begin = [self._bos] if self._field("add_bos_token") is True and self._bos is not None else []
        return begin + self._encode(text, special)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            special: whether control tokens appear by their names, instead of not at all.

        Raises:
            ValueError: there is no such token.
        """
        return b"".join(self.piece(i, special) for i in ids).decode(errors="replace")

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token; see `decode`."""
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"there is no token {token}; they go from 0 to {self.n_vocab - 1}")
        return b"" if token in self._control and not special else self._pieces[token]

    def detokenizer(self) -> Detokenizer:
        """Turns one text's tokens into text as they come."""
        return Detokenizer(self)

    def chat(self, messages: Sequence[Mapping[str, str]], answer: bool = True) -> list[int]:
        """Token ids of a conversation, by the template in the file.

        Names of control tokens inside a message count as such, as with other programs: take them out of what you do
        not trust, with `plain`.

        Args:
            messages: each with ``role`` and ``content``.
            answer: whether the assistant's turn is begun at the end.

        Raises:
            ValueError: there is no template, or it does not accept these messages.
        """
        return self._encode(self.chat_text(messages, answer), special=True)

    def plain(self, text: str) -> str:
        """The text with every name of a control token broken up: what may go into a chat, wherever it comes from."""
        return self._control_names.sub(lambda first: first[0] + _BREAK, text)

    def chat_text(self, messages: Sequence[Mapping[str, str]], answer: bool = True) -> str:
        """The text of which `chat` gives the token ids."""
        for message in messages:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise ValueError(f"got the message {message!r}, but each needs the texts 'role' and 'content'")
        if not messages:
            raise ValueError("got no messages, but a chat needs one at least")
        given = {"messages": [dict(m) for m in messages], "add_generation_prompt": answer, **self._names}
        template = self._template
        try:
            return template.render(given)
        except Exception as error:  # a template is a program
            raise ValueError(f"{self._path}: its chat template does not accept these messages: {error}") from error

    @functools.cached_property
    def _template(self) -> Template:
        """The file's, compiled, which takes longer than all the rest of a chat."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self._fields.get("tokenizer.chat_template")
        if not isinstance(template, str):
            raise ValueError(f"{self._path}: it has no chat template; encode a prompt of your own instead")

        def raise_exception(reason: str) -> None:
            raise jinja2.TemplateError(reason)

        # The template comes from a file of unknown origin; these options are the ones it was written for.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(template)
        except Exception as error:
            raise ValueError(f"{self._path}: its chat template cannot be read: {error}") from error

    def _field(self, name: str) -> Any:
        return self._fields.get(f"tokenizer.ggml.{name}")

    def _text(self, name: str, default: str = "") -> str:
        value = self._field(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{self._path}: tokenizer.ggml.{name} is {reprlib.repr(value)}, but must be a text")
        return value or default

    def _id(self, name: str) -> int | None:
        value = self._field(name)
        if value is not None and not (isinstance(value, int) and 0 <= value < self.n_vocab):
            raise ValueError(f"{self._path}: {name} is {reprlib.repr(value)}, but there are {self.n_vocab} tokens")
        return value

    def _encode(self, text: str, special: bool) -> list[int]:
        encoder = self._special if special else self._plain
        if encoder is not None:
            return encoder.encode(text, add_special_tokens=False).ids
        return [self._of_byte[byte] for byte in text.encode()]

    def _encoder(self, special: list[str]) -> Encoder:
        from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

        merges = self._field("merges")
        if not isinstance(merges, list) or any(merge.count(" ") != 1 for merge in merges):
            raise ValueError(f"{self._path}: tokenizer.ggml.merges must hold pairs of tokens")
        bytes_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        before = {"gpt-2": [], "default": [], "smollm": [pre_tokenizers.Digits(individual_digits=True)]}
        if (name := self._text("pre", "default")) not in before:
            raise ValueError(f"{self._path}: its text is split in the way {name!r}; only {sorted(before)} are known")
        try:
            encoder = Tokenizer(models.BPE(self._ids, [tuple(merge.split(" ")) for merge in merges]))
        except BaseException as error:
            if not has_failed(error):
                raise
            raise ValueError(f"{self._path}: its tokens and merges do not fit together: {error}") from error
        encoder.pre_tokenizer = pre_tokenizers.Sequence([*before[name], bytes_level])
        encoder.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        return encoder

    def _byte_pieces(self, tokens: list[str], kinds: list[int]) -> list[bytes]:
        """Pieces of a vocabulary of bytes; a token of its own stands for the space."""
        pieces = [token.encode() for token in tokens]
        self._of_byte: dict[int, int] = {}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
            if kind == _BYTE:
                try:
                    byte = int(token.removeprefix("<0x").removesuffix(">"), 16)
                    pieces[i] = bytes([byte])
                except ValueError as error:
                    raise ValueError(f"{self._path}: the token {token!r} stands for no byte") from error
                self._of_byte.setdefault(byte, i)
        if len(self._of_byte) != 256 or any(
            kind == 1 and token != _SPACE for token, kind in zip(tokens, kinds, strict=True)
        ):
            raise ValueError(f"{self._path}: its tokenizer is SentencePiece with words; only one of bytes is known")
        if (space := self._ids.get(_SPACE)) is not None:
            pieces[space] = b" "
            self._of_byte[0x20] = space
        return pieces


def _bpe_pieces(tokens: list[str], kinds: list[int]) -> list[bytes]:
    letters = _byte_letters()
    pieces = []
    for token, kind in zip(tokens, kinds, strict=True):
        written = kind in (_CONTROL, _USER_DEFINED) or any(letter not in letters for letter in token)
        pieces.append(token.encode() if written else bytes(letters[letter] for letter in token))
    return pieces


class Detokenizer:
    """Text of tokens that come one by one. A character whose bytes are spread over tokens appears with the last one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is complete with this token; control tokens have none.

        Raises:
            ValueError: there is no such token.
        """
        return self._decoder.decode(self._tokenizer.piece(token))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if the last character is not complete, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
