"""Checkpoint formats of other projects, by kind of head; `treespec.heads.registry` names them."""
