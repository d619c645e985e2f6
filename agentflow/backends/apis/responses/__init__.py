"""OpenAI's responses.

``openai_responses`` writes requests, and ``responses_stream`` reads answers.
"""
