// A customer's agent: it searches the shop, looks at a product, buys it, and prints the purchase. It has no code for
// training. It reads the model from the variables that clients usually read.
import {readFileSync} from 'node:fs';
import {createOpenAICompatible} from '@ai-sdk/openai-compatible';
import {generateText, hasToolCall, stepCountIs, tool} from 'ai';
import {z} from 'zod';

const {SHOP_URL, OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, AGL_RESOURCES_FILE} = process.env;
if (!SHOP_URL || !OPENAI_BASE_URL || !OPENAI_MODEL || !AGL_RESOURCES_FILE) {
  throw new Error('SHOP_URL, OPENAI_BASE_URL, OPENAI_MODEL and AGL_RESOURCES_FILE must be set: run it with train.py');
}

const Task = z.object({wish: z.string()});
const Sampling = z.object({temperature: z.number().optional(), max_tokens: z.number().optional()});
const Resources = z.record(z.string(), z.object({model: z.string().optional(), sampling_parameters: Sampling.optional()}));

const {wish} = Task.parse(JSON.parse(readFileSync(0, 'utf8')));
const resources = Resources.parse(JSON.parse(readFileSync(AGL_RESOURCES_FILE, 'utf8')));
const sampling = Object.values(resources).find(({model}) => model === OPENAI_MODEL)?.sampling_parameters;

const ask = async (path: string, order?: object): Promise<{ok: boolean; text: string}> => {
  const reply = await fetch(`${SHOP_URL}/${path}`, order && {method: 'POST', body: JSON.stringify(order)});
  if (reply.status >= 500) throw new Error(`the shop failed: ${reply.status}`);
  return {ok: reply.ok, text: await reply.text()};
};

let open: string | undefined; // the product page that was opened last
let bought: {id: string; size: string} | undefined;

const tools = {
  search: tool({
    description: 'Find products by words, up to a price. Gives id, title and price of the first three.',
    inputSchema: z.object({query: z.string(), at_most: z.number().optional()}),
    execute: async ({query, at_most}) => {
      const given = new URLSearchParams(at_most === undefined ? {query} : {query, at_most: String(at_most)});
      return (await ask(`search?${given}`)).text;
    },
  }),
  look: tool({
    description: "Open a product's page: title, price and sizes.",
    inputSchema: z.object({id: z.string()}),
    execute: async ({id}) => {
      const {ok, text} = await ask(`products/${encodeURIComponent(id)}`);
      if (ok) open = id;
      return text;
    },
  }),
  buy: tool({
    description: 'Buy the product whose page is open.',
    inputSchema: z.object({size: z.string()}),
    execute: async ({size}) => {
      if (open === undefined) return 'look at a product first';
      const {ok, text} = await ask('orders', {id: open, size});
      if (ok) bought ??= {id: open, size}; // only the first order counts
      return text;
    },
  }),
};

const gateway = createOpenAICompatible({name: 'gateway', baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY});

const main = async () => {
  await generateText({
    model: gateway(OPENAI_MODEL),
    prompt: wish,
    tools,
    temperature: sampling?.temperature,
    maxOutputTokens: sampling?.max_tokens,
    stopWhen: [hasToolCall('buy'), stepCountIs(5)],
  });
  console.log(JSON.stringify(bought ?? null));
};

void main(); // an error ends the program with exit code 1
