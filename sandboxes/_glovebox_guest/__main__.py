"""Start of the guest: ``python -I -S <directory that holds _glovebox_guest/> '<config>'``."""

from _glovebox_guest.main import main

main()
