// Sends the requests that it reads, one in each line, by fetch, and writes each answer as one line of JSON.
import { createInterface } from "node:readline";

const [url] = process.argv.slice(2);
for await (const line of createInterface({ input: process.stdin })) {
  const [path, body] = JSON.parse(line);
  const headers = { "content-type": "application/json" };
  const answer = await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body) });
  const type = answer.headers.get("content-type");
  console.log(JSON.stringify([answer.status, type, await answer.text()]));
}
