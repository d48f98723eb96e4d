"""Filters of subscriptions: expressions over the tags and header fields of records."""
