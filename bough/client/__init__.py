"""The client for applications that call a running bough.

from bough.client import ChatPrompt, Client, GenerateOptions, Message, Tokens
"""

from bough.client.client import Client
from bough.protocol.generation import ChatPrompt, Finished, GenerateOptions, Message, TextPrompt, TokenPrompt, Tokens
from bough.protocol.sampling_params import SamplingParams

__all__ = [
    "ChatPrompt",
    "Client",
    "Finished",
    "GenerateOptions",
    "Message",
    "SamplingParams",
    "TextPrompt",
    "TokenPrompt",
    "Tokens",
]
