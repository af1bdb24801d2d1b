"""Log-probabilities of tokens as OpenAI writes them, for chats and for completions."""

from typing import Any

from treespec.answer import Answer
from treespec.decode import Piece
from treespec.serve.state import State


def of_chat(state: State, options: dict, tokens: list[int], answer: Answer) -> Any:
    return None


def of_piece(state: State, options: dict, piece: Piece) -> Any:
    return None


def of_completion(state: State, options: dict, answer: Answer) -> Any:
    return None


def of_piece_completion(state: State, options: dict, piece: Piece) -> Any:
    return None
