"""Methods that the five papers compare or combine with, one file each."""
