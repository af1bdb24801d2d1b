"""Check that no other user can put code into a file that this process loads."""

import os
import stat
from pathlib import Path

from treespec.errors import InputError

ROOT_USER = 0
# An owner who is unknown in a container's user namespace, as of the container's own root folder.
UNKNOWN_USER = 65534


def check_ownership(path: Path) -> None:
    """Check that only this user and the system's can change a file or a folder, or a folder above it.

    On a system without user ids (Windows) nothing is checked.

    Raises: InputError with the path that is not safe. OSError if the path does not exist.
    """
    if not hasattr(os, "geteuid"):
        return
    owners = {ROOT_USER, os.geteuid()}
    real_path = path.resolve(strict=True)
    check_owner(real_path, owners)
    for folder in real_path.parents:
        check_owner(folder, owners | {UNKNOWN_USER})
    for link in (path.absolute(), *path.absolute().parents):
        if link.is_symlink() and link.lstat().st_uid not in owners:
            raise InputError(f"the link {link} belongs to user {link.lstat().st_uid}")


def check_owner(path: Path, owners: set[int]) -> None:
    """Check that one of `owners` owns a path, and that no other user may write it. Raises InputError or OSError.

    In a folder with the sticky bit, such as /tmp, others may write, but not replace what is not theirs.
    """
    status = path.stat()
    if status.st_uid not in owners:
        raise InputError(f"{path} belongs to user {status.st_uid}")
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if can_others_write(status) and not is_sticky:
        raise InputError(f"other users may write {path}: chmod go-w {path}")


def can_others_write(status: os.stat_result) -> bool:
    """Whether a file's mode lets other users write it."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not is_private_group(status.st_gid)


def is_private_group(group_id: int) -> bool:
    """Whether a group has no member but this process's user or root, as most systems make one for each user."""
    import grp
    import pwd

    try:
        group = grp.getgrgid(group_id)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    is_named_so = group.gr_name in (user, "root")
    return is_named_so and set(group.gr_mem) <= {user, "root"}
