"""What each client does: a function from a server's address to what came of it, twice the same if the server is exact.

A client is imported in its own function: not all of them are installed, and some take seconds.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic

KEY = "none"
PROMPT = "It was a bright morning, and"
SEED = 11
NUM_TOKENS = 100
LIMIT = 700  # of answers that end by themselves


class Person(pydantic.BaseModel, extra="forbid"):
    """A person. A small model would never be done with further fields."""

    name: str = pydantic.Field(pattern="^[A-Z][a-z]{2,8}$")
    age: int = pydantic.Field(ge=0, le=150)
    days: list[Literal["mon", "tue", "wed"]] = pydantic.Field(min_length=12, max_length=12)


City = Annotated[Literal["Rome", "Oslo", "Lima"], pydantic.Field(description="where")]


def openai_agents(url: str, model: str) -> Any:
    """Answers of a class, a tool that is called, and a stream, over /v1/responses and as chats."""
    import agents  # noqa: PLC0415
    from openai import AsyncOpenAI  # noqa: PLC0415

    agents.set_tracing_disabled(True)
    called: list[str] = []

    @agents.function_tool
    def weather(city: City) -> str:
        """Says the weather."""
        called.append(city)
        return "rain"

    def settings(**more: Any) -> agents.ModelSettings:
        return agents.ModelSettings(temperature=0.0, max_tokens=LIMIT, extra_body={"seed": SEED}, **more)

    found: list[Any] = []
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        spoken = kind(model=model, openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0))
        structured = agents.Agent(name="a", model=spoken, model_settings=settings(), output_type=Person)
        found.append(agents.Runner.run_sync(structured, PROMPT).final_output.model_dump())
        using = agents.Agent(
            name="b",
            model=spoken,
            model_settings=settings(tool_choice="required", parallel_tool_calls=False),
            tools=[weather],
            tool_use_behavior="stop_on_first_tool",
        )
        found.append(agents.Runner.run_sync(using, "How is the weather?").final_output)
    assert len(called) >= 2, "with both kinds of model"
    return [found, called]


def pydantic_ai(url: str, model: str) -> Any:
    """An answer of a class through a tool, a tool that is called, a stream, a conversation."""
    from pydantic_ai import Agent, ModelSettings, NativeOutput  # noqa: PLC0415
    from pydantic_ai.models.openai import OpenAIChatModel  # noqa: PLC0415
    from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415

    spoken = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    settings = ModelSettings(temperature=0.0, seed=SEED, max_tokens=LIMIT)
    found: list[Any] = []
    for output in (Person, NativeOutput(Person)):
        found.append(Agent(spoken, output_type=output, model_settings=settings).run_sync(PROMPT).output.model_dump())
    talking = Agent(spoken, model_settings=settings)
    first = talking.run_sync(PROMPT)
    found += [first.output, talking.run_sync("And then?", message_history=first.all_messages()).output]
    return found


def instructor(url: str, model: str) -> Any:
    """Answers of a class, in two ways to ask for them."""
    import instructor  # noqa: PLC0415
    import openai  # noqa: PLC0415

    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            person = instructor.from_openai(client, mode=mode).chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": PROMPT}],
                response_model=Person,
                temperature=0,
                seed=SEED,
                max_tokens=LIMIT,
                max_retries=0,
            )
            found.append(person.model_dump())
    return found


def langchain(url: str, model: str) -> Any:
    """Texts, streams, classes in two ways, tools, embeddings."""
    from langchain_core.tools import tool  # noqa: PLC0415
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings  # noqa: PLC0415

    @tool
    def weather(city: City) -> str:
        """Says the weather."""
        return f"rain in {city}"

    chat = ChatOpenAI(
        base_url=f"{url}/v1", api_key=KEY, model=model, temperature=0, seed=SEED, max_tokens=NUM_TOKENS, max_retries=0
    )
    found: list[Any] = [chat.invoke(PROMPT).content, "".join(str(chunk.content) for chunk in chat.stream(PROMPT))]
    assert found[0] == found[1]
    longer = chat.model_copy(update={"max_tokens": LIMIT})
    for method in ("json_schema", "function_calling"):
        found.append(longer.with_structured_output(Person, method=method).invoke(PROMPT).model_dump())
    using = longer.bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    (call,) = using.invoke("The weather?").tool_calls
    found.append([call["name"], call["args"], weather.invoke(call["args"])])
    embeddings = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key=KEY, model=model, check_embedding_ctx_length=False, max_retries=0
    )
    found.append(embeddings.embed_documents([f"{PROMPT} {n}" for n in range(20)]))
    return found


def outlines(url: str, model: str) -> Any:
    """A class, a choice and a regular expression, as for OpenAI and as for vLLM."""
    import openai  # noqa: PLC0415
    import outlines  # noqa: PLC0415

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        options: dict[str, Any] = {"temperature": 0, "seed": SEED, "max_tokens": LIMIT}
        found: list[Any] = []
        for spoken in (outlines.from_openai(client, model), outlines.from_vllm(client, model)):
            found.append(Person.model_validate_json(spoken(PROMPT, Person, **options)).model_dump())
        spoken = outlines.from_vllm(client, model)
        found.append(spoken(PROMPT, Literal["yes", "no"], **options))
        found.append(spoken(PROMPT, outlines.types.Regex("(ab|cd){40}"), **options))
        found.append(spoken(PROMPT, **options))
    return found


def litellm(url: str, model: str) -> Any:
    """Texts, streams, a class, a tool, embeddings; as OpenAI and as a vLLM that is hosted."""
    import litellm  # noqa: PLC0415

    litellm.telemetry = False
    found: list[Any] = []
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": PROMPT}],
        "api_base": f"{url}/v1", "api_key": KEY, "temperature": 0, "seed": SEED, "max_tokens": LIMIT,
        "max_retries": 0,
    }  # fmt: skip
    for name in (f"openai/{model}", f"hosted_vllm/{model}"):
        found.append(litellm.completion(model=name, **asked).choices[0].message.content)
        chunks = litellm.completion(model=name, stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == found[-1]
        answer = litellm.completion(model=name, response_format=Person, **asked).choices[0].message.content
        found.append(Person.model_validate_json(answer).model_dump())
        embedded = litellm.embedding(
            model=name, input=[PROMPT, "x"], api_base=f"{url}/v1", api_key=KEY, encoding_format="float"
        )
        found.append([each["embedding"] for each in embedded.data])
    return found


def llama_index(url: str, model: str) -> Any:
    """Texts, streams, chats, a class."""
    from llama_index.core.llms import ChatMessage  # noqa: PLC0415
    from llama_index.llms.openai_like import OpenAILike  # noqa: PLC0415

    spoken = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=LIMIT,
        max_retries=0,
        additional_kwargs={"seed": SEED},
    )
    whole = spoken.complete(PROMPT).text
    assert "".join(part.delta or "" for part in spoken.stream_complete(PROMPT)) == whole
    said = spoken.chat([ChatMessage(role="user", content=PROMPT)]).message.content
    person = spoken.as_structured_llm(Person)
    return [whole, said, person.complete(PROMPT).raw.model_dump()]


# By what must be importable, and what is asked of it
SCENARIOS: dict[str, Callable[[str, str], Any]] = {
    "agents": openai_agents,
    "pydantic_ai": pydantic_ai,
    "instructor": instructor,
    "langchain_openai": langchain,
    "outlines": outlines,
    "litellm": litellm,
    "llama_index.llms.openai_like": llama_index,
}
