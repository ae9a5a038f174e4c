from agentlightning.integrations.dspy import dspy_lm as dspy_lm
from agentlightning.integrations.llama_index import llama_index_llm as llama_index_llm
