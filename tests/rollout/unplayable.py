"""Classes that cannot play episodes. Workers read this file as the user's own."""


class NoReset:
    def act(self):
        """Act."""


class NeedsSize:
    def __init__(self, size, colour="red", *others, **more):
        pass

    def reset(self, **row):
        pass


class NoHint:
    def reset(self, **row):
        pass

    def act(self, where):
        """Act.

        Args:
            where: Place.
        """
