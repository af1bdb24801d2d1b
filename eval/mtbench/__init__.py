"""`treespec eval`: questions to several configurations; acceptance length, speed, right answers."""
