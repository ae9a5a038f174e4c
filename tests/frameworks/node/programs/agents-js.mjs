// The OpenAI Agents SDK for JavaScript, over chat completions and responses: an agent asks another one as a tool, or
// hands over to it; each has a client whose URL names its role.
import {Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, setTracingDisabled, tool} from '@openai/agents';
import OpenAI from 'openai';
import {Factors, model as name, multiply, run, task} from './agent.mjs';

setTracingDisabled(true); // it sends traces to its vendor
const Model = process.argv[3] === 'chat' ? OpenAIChatCompletionsModel : OpenAIResponsesModel;
const modelOf = (role) =>
  new Model(new OpenAI({baseURL: process.env.OPENAI_BASE_URL.replace('/rollout/', `/role/${role}/rollout/`)}), name);

const times = tool({name: 'multiply', description: 'a times b', parameters: Factors, execute: multiply});
const solver = new Agent({name: 'solver', instructions: 'You are solver.', model: modelOf('solver'), tools: [times]});
const chair = {name: 'chair', instructions: 'You are chair.', model: modelOf('chair')};
const asks = new Agent({...chair, tools: [solver.asTool({toolName: 'ask_solver', toolDescription: 'multiplies'})]});
const runner = new Runner();

const toolLoop = async () => (await runner.run(solver, task)).finalOutput;
const agentAsTool = async () => (await runner.run(asks, task)).finalOutput;
const handoff = async () => (await runner.run(new Agent({...chair, handoffs: [solver]}), task)).finalOutput;

async function streams() {
  const stream = await runner.run(asks, task, {stream: true});
  let text = '';
  for await (const word of stream.toTextStream()) text += word;
  await stream.completed;
  return text;
}

await run({toolLoop, agentAsTool, handoff, streams});
