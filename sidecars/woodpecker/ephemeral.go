package main

import (
	"context"
	"sync"
	"time"
)

// ephemeral is a channel in the memory of the sidecar: it forgets its oldest records over a number of bytes, and all
// with the sidecar. Its ids begin with the sidecar's incarnation, so that none comes again.
type ephemeral struct {
	name   string
	policy policy

	mu     sync.Mutex
	tail   tail
	zero   uint64
	latest uint64
	news   news
	gone   bool
}

// newEphemeral makes a channel whose ids are above `zero`.
func newEphemeral(name string, p policy, zero uint64) *ephemeral {
	return &ephemeral{name: name, policy: p, zero: zero, latest: zero, tail: tail{from: zero}}
}

func (e *ephemeral) policyOf() policy { return e.policy }

func (e *ephemeral) submit(p *part) {
	e.mu.Lock()
	if e.gone {
		e.mu.Unlock()
		p.fail(notFound(e.name))
		return
	}
	for i := range p.records {
		e.latest++
		p.records[i].id = e.latest
	}
	e.tail.add(p.records, e.policy.EphemeralBytes)
	e.news.tell()
	e.mu.Unlock()
	p.done()
}

func (e *ephemeral) describe(context.Context) (uint64, uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.latest == e.zero:
		return 0, 0, nil
	case len(e.tail.records) == 0:
		return 0, e.latest, nil
	}
	return e.tail.records[0].id, e.latest, nil
}

func (e *ephemeral) begin(ctx context.Context, from start) (uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch from.kind {
	case "earliest":
		return e.tail.from + 1, nil
	case "latest":
		return e.latest + 1, nil
	case "next":
		return from.id, nil
	case "time":
		return e.at(from.timestamp, e.latest+1), nil
	}
	if len(from.raw) != 8 || from.id <= e.zero || from.id > e.latest {
		return 0, failure("PositionLost", "channel "+e.name+" has no such entry", map[string]any{
			"channel": e.name, "requested": from.raw, "first_available": nil,
		})
	}
	if from.inclusive {
		return from.id, nil
	}
	return from.id + 1, nil
}

// at is the id of the first record from `timestamp` on; `otherwise` where there is none. With the lock.
func (e *ephemeral) at(timestamp, otherwise uint64) uint64 {
	for _, each := range e.tail.records {
		if each.timestamp >= timestamp {
			return each.id
		}
	}
	return otherwise
}

// read goes on at the oldest record where the next one is forgotten.
func (e *ephemeral) read(ctx context.Context, position uint64, wait time.Duration) ([]record, uint64, error) {
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	for {
		e.mu.Lock()
		changed, gone, latest, records := e.news.wait(), e.gone, e.latest, e.tail.at(position)
		e.mu.Unlock()
		if gone {
			return nil, 0, notFound(e.name)
		}
		if len(records) > 0 {
			return records, latest, nil
		}
		select {
		case <-changed:
		case <-deadline.C:
			return nil, latest, nil
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
}

func (e *ephemeral) idAt(_ context.Context, timestamp uint64) (uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.at(timestamp, 0), nil
}

func (e *ephemeral) truncate(_ context.Context, id uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tail.forgetBefore(id)
	return nil
}

// hold does nothing: what is ephemeral goes all the same.
func (e *ephemeral) hold(context.Context, string, uint64) error { return nil }

func (e *ephemeral) drop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.gone = true
	e.tail.restart(e.latest)
	e.news.tell()
}
