"""Which files of a served directory programs must not read, known at every moment: ``index`` on ``inotify``."""
