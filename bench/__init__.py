"""Speed and memory, each figure against something measured in the same run: `python -m bench`."""

import kldtui.ui  # noqa: F401 - says how often Textual paints, before anything imports that
