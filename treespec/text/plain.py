"""The file that `--text` names: conversations by its name, or plain text."""

from pathlib import Path

from treespec.errors import InputError

CONVERSATIONS = (".jsonl", ".json")  # suffixes of files of conversations; others are plain text


def content_of(text: str) -> bytes:
    """The bytes of the file that `--text` names.

    Raises InputError for a file that cannot be read or is not UTF-8.
    """
    try:
        content = Path(text).read_bytes()
        content.decode()
    except OSError as error:
        raise InputError(f"cannot read --text {text}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--text {text} is not text in UTF-8") from error
    return content
