"""Topics as clients see them: what is sent to them, and what members of groups get."""
