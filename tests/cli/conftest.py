from support.command_line import model, quiet, run, text

__all__ = ["model", "quiet", "run", "text"]
