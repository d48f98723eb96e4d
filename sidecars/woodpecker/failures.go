package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/zilliztech/woodpecker/common/werr"
)

// tidewalError is an error with the name and the fields that it has in Tidewal (runtime/errors.py).
type tidewalError struct {
	code, message string
	fields        map[string]any
}

func (e *tidewalError) Error() string { return e.code + ": " + e.message }

func (e *tidewalError) wire() map[string]any {
	fields := e.fields
	if fields == nil {
		fields = map[string]any{}
	}
	return map[string]any{"code": e.code, "message": e.message, "fields": fields}
}

func failure(code, message string, fields map[string]any) *tidewalError {
	return &tidewalError{code, message, fields}
}

func invalid(message string) *tidewalError { return failure("InvalidRequest", message, nil) }

func notFound(channel string) *tidewalError {
	return failure("ChannelNotFound", "no channel "+channel+"; create it first", map[string]any{"channel": channel})
}

func fenced(channel string) *tidewalError {
	message := "another sidecar has taken over the log: this one appends nothing more to " + channel
	return failure("Fenced", message, map[string]any{"channel": channel})
}

// ofUnknownOutcome is the same error of an append that may be in the log all the same.
func ofUnknownOutcome(err *tidewalError) *tidewalError {
	fields := map[string]any{"outcome_unknown": true}
	for name, value := range err.fields {
		fields[name] = value
	}
	return failure(err.code, err.message, fields)
}

// translated is the error of Tidewal for one of Woodpecker or etcd.
func translated(err error, channel string) *tidewalError {
	var known *tidewalError
	switch {
	case errors.As(err, &known):
		return known
	case werr.ErrFileReaderCRCMismatch.Is(err), werr.ErrFileReaderCorrupted.Is(err), werr.ErrChecksumError.Is(err):
		return failure("CorruptLog", fmt.Sprintf("channel %s: %v", channel, err), nil)
	case errors.Is(err, context.Canceled):
		return failure("Unavailable", "the sidecar is closing", nil)
	}
	return failure("Unavailable", fmt.Sprintf("Woodpecker, channel %s: %v", channel, err), nil)
}
