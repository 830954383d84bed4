"""The project's own research: tables and claims of papers, studies, and how the toy models were made."""
