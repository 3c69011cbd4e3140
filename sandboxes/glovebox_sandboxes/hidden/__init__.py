"""Index of the files of a served directory that programs must not read, always current: ``index`` on ``inotify``."""
