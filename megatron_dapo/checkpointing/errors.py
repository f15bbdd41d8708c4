"""What goes wrong with a checkpoint and is not a mistake of the user."""


class CheckpointError(RuntimeError):
    """Files could not be written: a full disk, a failed write, a writer that died. Raised on every rank alike."""
