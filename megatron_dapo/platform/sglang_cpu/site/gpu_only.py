"""Names for the stand-ins of this folder that can be imported but not called."""


def names_of(module):
    """A module's `__getattr__`: every public name is a function that refuses to be called."""

    def refuse(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args, **kwargs):
            raise NotImplementedError(f"{module}.{name} is not there on this machine: the server runs on the CPU.")

        return absent

    return refuse
