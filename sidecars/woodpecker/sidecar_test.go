package main

import (
	"context"
	"testing"
)

// slowToDrop is a channel whose end takes until it is let go on.
type slowToDrop struct {
	channel
	dropping, goOn chan struct{}
}

func (c *slowToDrop) policyOf() policy { return policy{Ephemeral: true, Temporary: true} }

func (c *slowToDrop) drop() {
	close(c.dropping)
	<-c.goOn
}

// A segment of Woodpecker that is fenced is read to its end, and a channel that is dropped fences its last one.
func TestADropHoldsUpItsOwnNameAlone(t *testing.T) {
	ctx, temporary := context.Background(), policy{Ephemeral: true, Temporary: true}
	slow := &slowToDrop{dropping: make(chan struct{}), goOn: make(chan struct{})}
	s := &sidecar{channels: map[string]channel{"slow": slow}}
	dropped, created := make(chan error), make(chan error)
	go func() { dropped <- s.drop(ctx, "slow") }()
	<-slow.dropping
	if err := s.create(ctx, "other", temporary); err != nil {
		t.Fatal(err)
	}
	if err := s.drop(ctx, "other"); err != nil {
		t.Fatal(err)
	}
	go func() { created <- s.create(ctx, "slow", temporary) }()
	close(slow.goOn)
	if err := <-dropped; err != nil {
		t.Fatal(err)
	}
	if err := <-created; err != nil {
		t.Fatal(err)
	}
	if _, again := s.channels["slow"].(*slowToDrop); again || len(s.changing.locks) != 0 {
		t.Fatalf("%v, and %d locks are left", s.channels, len(s.changing.locks))
	}
}
