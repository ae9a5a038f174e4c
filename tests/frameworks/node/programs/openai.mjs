// The openai package: chat completions and responses; tools and its tool runner, streams, parsed answers.
import OpenAI from 'openai';
import {zodResponseFormat, zodTextFormat} from 'openai/helpers/zod';
import {Product, model, multiply, parameters, run, task} from './agent.mjs';

const client = new OpenAI();
const messages = [{role: 'system', content: 'Use the tool.'}, {role: 'user', content: task}];
const described = {name: 'multiply', description: 'a times b', parameters};
const tools = [{type: 'function', function: described}];
const flatTools = [{type: 'function', strict: true, ...described}];

async function chat() {
  while (true) {
    const {message} = (await client.chat.completions.create({model, messages, tools, temperature: 0.5})).choices[0];
    messages.push(message);
    if (!message.tool_calls) return message.content;
    for (const call of message.tool_calls) {
      const content = multiply(JSON.parse(call.function.arguments));
      messages.push({role: 'tool', tool_call_id: call.id, content});
    }
  }
}

async function chatStreams() {
  const words = [];
  const runnable = {...described, function: multiply, parse: JSON.parse};
  const runner = client.chat.completions.runTools({
    model,
    messages,
    tools: [{type: 'function', function: runnable}],
    stream: true,
    stream_options: {include_usage: true},
  });
  runner.on('content', (delta) => words.push(delta));
  const text = await runner.finalContent();
  return {words, text, used: (await runner.totalUsage()).total_tokens};
}

async function chatParsed() {
  const response_format = zodResponseFormat(Product, 'product');
  return (await client.chat.completions.parse({model, messages, response_format})).choices[0].message.parsed;
}

async function chatSideBySide() {
  const ask = async (style) => {
    const asked = [{role: 'user', content: `${task} Answer ${style}.`}];
    return (await client.chat.completions.create({model, messages: asked})).choices[0].message.content;
  };
  return Promise.all(['tersely', 'in verse', 'in French', 'at length'].map(ask));
}

async function responses() {
  const input = [{role: 'user', content: task}];
  while (true) {
    const response = await client.responses.create({model, instructions: 'Use the tool.', input, tools: flatTools});
    input.push(...response.output);
    const calls = response.output.filter((item) => item.type === 'function_call');
    if (!calls.length) return response.output_text;
    for (const {call_id, arguments: given} of calls) {
      input.push({type: 'function_call_output', call_id, output: multiply(JSON.parse(given))});
    }
  }
}

async function responsesRemembered() {
  let response = await client.responses.create({model, input: task, tools: flatTools});
  while (true) {
    const calls = response.output.filter((item) => item.type === 'function_call');
    if (!calls.length) return response.output_text;
    const input = calls.map(({call_id, arguments: given}) => {
      return {type: 'function_call_output', call_id, output: multiply(JSON.parse(given))};
    });
    response = await client.responses.create({model, previous_response_id: response.id, input, tools: flatTools});
  }
}

async function responsesStreams() {
  const words = [];
  const input = [{role: 'user', content: task}];
  const first = await client.responses.stream({model, input, tools: flatTools}).finalResponse();
  for (const {call_id, arguments: given} of first.output) {
    input.push(...first.output, {type: 'function_call_output', call_id, output: multiply(JSON.parse(given))});
  }
  const stream = client.responses.stream({model, input, tools: flatTools});
  stream.on('response.output_text.delta', ({delta}) => words.push(delta));
  const response = await stream.finalResponse();
  return {words, text: response.output_text, used: response.usage.total_tokens};
}

async function responsesParsed() {
  const format = zodTextFormat(Product, 'product');
  return (await client.responses.parse({model, input: task, text: {format}})).output_parsed;
}

await run({
  chat,
  chatStreams,
  chatParsed,
  chatSideBySide,
  responses,
  responsesRemembered,
  responsesStreams,
  responsesParsed,
});
