"""A network of namespaces on one machine whose links have the rates of a profile. Imports no torch."""
