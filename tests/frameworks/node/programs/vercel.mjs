// The Vercel AI SDK with its three providers; tools, streams, structured output, and its agent.
import {createAnthropic} from '@ai-sdk/anthropic';
import {createOpenAI} from '@ai-sdk/openai';
import {createOpenAICompatible} from '@ai-sdk/openai-compatible';
import {Output, ToolLoopAgent, generateText, stepCountIs, streamText, tool} from 'ai';
import {Factors, Product, model as name, multiply, run, task} from './agent.mjs';

const {OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey} = process.env;
const openai = createOpenAI({baseURL, apiKey});
const compatible = {name: 'gateway', includeUsage: true, supportsStructuredOutputs: true};
const model = {
  responses: () => openai(name),
  chat: () => openai.chat(name),
  compatible: () => createOpenAICompatible({...compatible, baseURL, apiKey})(name),
  anthropic: () => createAnthropic({baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1`, apiKey})(name),
}[process.argv[3]]();

const tools = {multiply: tool({description: 'a times b', inputSchema: Factors, execute: multiply})};
const asked = {model, system: 'Use the tool.', prompt: task, tools, stopWhen: stepCountIs(5), maxRetries: 0};

const toolLoop = async () => (await generateText(asked)).text;

async function streams() {
  const result = streamText({...asked, onError: ({error}) => console.error(error)});
  const words = [];
  for await (const word of result.textStream) words.push(word);
  return {words, text: await result.text, used: (await result.totalUsage).totalTokens};
}

async function parsed() {
  return (await generateText({model, prompt: task, output: Output.object({schema: Product}), maxRetries: 0})).output;
}

async function parsedAfterTool() {
  return (await generateText({...asked, output: Output.object({schema: Product})})).output;
}

async function sideBySide() {
  const ask = async (style) => (await generateText({model, prompt: `${task} Answer ${style}.`, maxRetries: 0})).text;
  return Promise.all(['tersely', 'in verse', 'in French', 'at length'].map(ask));
}

async function agent() {
  const helper = new ToolLoopAgent({model, instructions: 'Use the tool.', tools});
  const first = await helper.generate({prompt: task});
  const messages = [{role: 'user', content: task}, ...first.response.messages, {role: 'user', content: 'And why?'}];
  return [first.text, (await helper.generate({messages})).text];
}

// A tool that only OpenAI's servers have is refused, and a stream that fails is an empty text to a program that does
// not ask for the error.
async function swallowed() {
  const {text: guess} = await generateText({model, prompt: `${task} Guess.`});
  const search = {tools: {web_search: openai.tools.webSearch({})}, toolChoice: 'required'}; // nothing here can run it
  const result = streamText({model, prompt: `${task} Search.`, ...search, onError: () => undefined});
  let found = '';
  for await (const word of result.textStream) found += word;
  return [guess, found];
}

await run({toolLoop, streams, parsed, parsedAfterTool, sideBySide, agent, swallowed});
