"""Entry points under the names and with the operands of other projects.

Nothing in the package imports these modules, and each says what it needs.
"""
