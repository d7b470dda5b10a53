"""The ``marlin-jit`` command. Installed as ``marlin_jit.cli``; each module beside this holds one command."""
