"""Figures and tables: what the commands show, formatted."""
