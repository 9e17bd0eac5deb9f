"""The screens: what a person sees and presses."""

import os

# A key that comes just after a frame (a scan's progress, say) waits up to two of Textual's ticks
# for its own: 33 ms at 60 a second. It reads this when it is imported.
os.environ.setdefault("TEXTUAL_FPS", "120")
