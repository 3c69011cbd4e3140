"""What every Python in a sandbox imports when it starts: this folder is on the path of those that programs start."""
