"""Runs made from models that answer: scored, rolled out, or imported from logged conversations.

Knows: recordings, engines, and how a recording that was stopped goes on.
Must not know: servers' requests, the command line, the screen.
"""
