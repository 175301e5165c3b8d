"""The one error a user's mistake raises."""


class UserError(ValueError):
    """A mistake in what the user gave: one sentence naming the field, its value, what is allowed.

    The command line prints it without a traceback and exits with status 2.
    """
