"""Transactions: writes to several collections and topics that readers see together."""
