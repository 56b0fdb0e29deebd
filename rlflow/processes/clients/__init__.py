"""Send requests to servers over HTTP: rewards, judges, retrievers, tools and environments.

The package sends requests, retries them and applies deadlines. The content of requests and answers belongs to
the callers.
"""
