"""Speed and memory, each figure against something measured in the same run: `python -m bench`."""
