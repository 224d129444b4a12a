"""An OpenAI-compatible server. Nothing here is imported by the library; extra `serve`."""
