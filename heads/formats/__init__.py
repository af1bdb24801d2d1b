"""Checkpoint formats of other projects, a module for each kind of head; `treespec.heads.registry` names them."""
