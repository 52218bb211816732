"""Which ranks answer, what each of them does, and which of them, or which link, keeps the others waiting."""
