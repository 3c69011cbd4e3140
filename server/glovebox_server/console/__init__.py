"""The web page for the people who watch over calls. It shows what the commands show, by the same functions."""
