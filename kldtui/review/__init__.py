"""One review: its recordings and their figures, its list, its engines, its branches and labels.

Knows: everything below, as one thing to ask; a screen and the commands are given a `session`.
Must not know: screens, keys, the command line.
"""
