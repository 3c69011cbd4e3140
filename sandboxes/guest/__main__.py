"""Start of the guest: ``python -I -S <directory that holds sandboxes/> '<config>'``."""

from sandboxes.guest.main import main

main()
