"""Questions to servers: rewards, judges, retrievers, tools and environments that answer over HTTP.

Here: how a question is put, when it is put again, and how long it may take.
Not here: what is asked, and what an answer means.
"""
