// What the programs of this folder share: their task and model, their tool, their answer as one line of JSON.
import {z} from 'zod';

export const task = process.env.TASK;
export const model = process.env.MODEL;
export const multiply = ({a, b}) => String(a * b);

export const Factors = z.object({a: z.number(), b: z.number()});
export const Product = z.object({a: z.number(), b: z.number(), value: z.number()});
export const parameters = {
  type: 'object',
  properties: {a: {type: 'number'}, b: {type: 'number'}},
  required: ['a', 'b'],
  additionalProperties: false,
};

// Run the agent that the command line names, and print what it returns.
export const run = async (agents) => console.log(JSON.stringify(await agents[process.argv[2]]()));
