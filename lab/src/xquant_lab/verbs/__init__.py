"""The laboratory's verbs of the command ``xquant``, one a file."""
