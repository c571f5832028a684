// The Vercel AI SDK, whose schema fills in a default and drops a key, and whose numbers are JavaScript's.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const calls = [];
const look_up = tool({
  description: "Look the weather of a city up.",
  inputSchema: z.object({ city: z.string().trim(), number: z.number(), unit: z.string().default("celsius") }),
  execute: async ({ city, number, unit }) => {
    calls.push([city, number, unit]);
    return "9 degrees";
  },
});
const turnlog = createOpenAICompatible({
  name: "turnlog",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
});
const messages = [];
const answers = [];
for (const ask of ["What is the weather in Oslo?", "Are you sure?"]) {
  messages.push({ role: "user", content: ask });
  const done = await generateText({
    model: turnlog("policy"),
    system: "You tell the weather.",
    messages,
    tools: { look_up },
    stopWhen: stepCountIs(5),
  });
  messages.push(...done.responseMessages);
  answers.push(done.text);
}
console.log(JSON.stringify({ calls, answers }));
