// The @anthropic-ai/sdk package: messages; tools and its tool runner, streams, parsed answers.
import Anthropic from '@anthropic-ai/sdk';
import {betaZodTool} from '@anthropic-ai/sdk/helpers/beta/zod';
import {zodOutputFormat} from '@anthropic-ai/sdk/helpers/zod';
import {Factors, Product, model, multiply, parameters, run, task} from './agent.mjs';

const client = new Anthropic();
const max_tokens = 200;
const messages = [{role: 'user', content: task}];
const tools = [{name: 'multiply', description: 'a times b', input_schema: parameters}];
const textOf = (message) => message.content.flatMap((block) => (block.type === 'text' ? [block.text] : [])).join('');

function resultsOf(message) {
  const calls = message.content.filter((block) => block.type === 'tool_use');
  return calls.map(({id, input}) => ({type: 'tool_result', tool_use_id: id, content: multiply(input)}));
}

async function tool() {
  while (true) {
    const message = await client.messages.create({model, max_tokens, system: 'Use the tool.', messages, tools});
    if (message.stop_reason !== 'tool_use') return textOf(message);
    messages.push({role: 'assistant', content: message.content}, {role: 'user', content: resultsOf(message)});
  }
}

async function streams() {
  const words = [];
  const first = await client.messages.stream({model, max_tokens, messages, tools}).finalMessage();
  messages.push({role: 'assistant', content: first.content}, {role: 'user', content: resultsOf(first)});
  const stream = client.messages.stream({model, max_tokens, messages, tools});
  stream.on('text', (text) => words.push(text));
  const message = await stream.finalMessage();
  return {words, text: textOf(message), used: message.usage.input_tokens + message.usage.output_tokens};
}

async function toolRunner() {
  const runnable = betaZodTool({name: 'multiply', description: 'a times b', inputSchema: Factors, run: multiply});
  return textOf(await client.beta.messages.toolRunner({model, max_tokens, messages, tools: [runnable]}));
}

async function thinking() {
  const thought = {type: 'enabled', budget_tokens: 1024};
  const said = [];
  while (true) {
    const message = await client.messages.create({model, max_tokens: 2048, messages, tools, thinking: thought});
    said.push(...message.content.flatMap((block) => (block.type === 'thinking' ? [block.thinking] : [])));
    if (message.stop_reason !== 'tool_use') return [...said, textOf(message)];
    messages.push({role: 'assistant', content: message.content}, {role: 'user', content: resultsOf(message)});
  }
}

async function parsed() {
  const output_config = {format: zodOutputFormat(Product)};
  return (await client.messages.parse({model, max_tokens, messages, output_config})).parsed_output;
}

async function sideBySide() {
  const ask = async (style) => {
    const asked = [{role: 'user', content: `${task} Answer ${style}.`}];
    return textOf(await client.messages.create({model, max_tokens, messages: asked}));
  };
  return Promise.all(['tersely', 'in verse', 'in French', 'at length'].map(ask));
}

await run({tool, streams, toolRunner, thinking, parsed, sideBySide});
